"""What every part of the driver needs: files, cache, progress, the machine."""
