"""On which stream a model computes."""

import torch

from fsdpctl.errors import EngineError


class ComputeStream:
    """The stream that was current when a model was sharded, on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def refuse_another(self) -> None:
        """Autograd brings gradients on this one, whichever a backward is called on.

        Raises:
            EngineError: another stream is current; its work would race with that.
        """
        if self._stream is not None and torch.cuda.current_stream(self._device) != self._stream:
            raise EngineError(
                "the model runs on another CUDA stream than the one it was sharded on: call "
                "shard_model and train within the same torch.cuda.stream(…)"
            )
