"""A console for long runs."""

import os

from rich.console import Console


class PatientConsole(Console):
    """Falls silent when its reader goes away (`fsdpctl train | head`); the run goes on."""

    def on_broken_pipe(self) -> None:
        """Send what is still printed nowhere."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
