"""Load a `.dsmodel` bundle and generate text with it."""
