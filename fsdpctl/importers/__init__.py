"""Settings of other tools translated to fsdpctl settings. No third-party code is executed."""
