"""Steps the flat shards: optimizers, gradient norm and clipping, learning-rate schedules."""
