"""What the book measures and computes with; `miniddp` never imports it."""
