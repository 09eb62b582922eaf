"""The Hugging Face hub: names -> folders on this machine."""
