"""One run: what it is made of, the loop, and the directory it lives in."""
