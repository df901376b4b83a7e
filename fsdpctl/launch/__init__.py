"""How a run is started: torch's elastic agent in this process, workers as its children."""
