"""Training of draft heads on text that the target wrote itself. It reads files only; generation is in tools/train_data.py."""
