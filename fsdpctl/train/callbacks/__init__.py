"""What a run does besides its steps, one module per callback."""
