"""What the server that ranks are forked from has imported already."""

import tests.engine.models
import tests.reference  # noqa: F401
