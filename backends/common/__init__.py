"""What every engine needs: errors, messages, options, captured output."""
