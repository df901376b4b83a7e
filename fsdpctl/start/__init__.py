"""From the settings of a run to ranks that train."""
