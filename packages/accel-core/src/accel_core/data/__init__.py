"""Data loaders: each rank its part, every sample once, and a position that any number of ranks can go on from.

A map of this folder, in the order in which a loader goes through it:

`prepare.prepare_data_loader` takes the user's loader. `presharded` refuses one that is split by rank already, or notes
that the user declared it so. What was asked for becomes a frozen `settings.LoaderSettings`, and the loader, of the
user's own class (`adapter`), is one of two:

- `loader.DataLoaderShard`: every rank reads its own part. Indices are shared out by `samplers.BatchSamplerShard`,
  streams by `samplers.IterableDatasetShard`; both only call the arithmetic of `shard`, which knows no torch. Nothing is
  shared out with one rank, or where loaders give each rank its own part.
- `dispatcher.DataLoaderDispatcher`: rank 0 reads and sends each rank its part (over a `scatter.ScatterChannel`).

`settings.mesh_parts` and `accel_core.mesh.layout` say which ranks read the same part, because they share a replica of
the model.

`iter(loader)` makes a `base.EpochState`, all that one iteration knows about itself, and runs in `loader`:

1. `_prologue`: ranks agree on generators and seed; the loader enters the gradient state.
2. `_open`: the user's iteration begins, at a pending position where there is one. `position.Indices` stands between
   torch and the sampler: it begins late, captures the generators where the order is drawn, and counts batches that are
   not full.
3. The end has to be known with the last batch. `_count_down` knows the number of batches; `_look_ahead` reads one
   ahead; `uneven.synchronized_batches` reads one ahead and agrees with the other ranks.
4. `_serve`, before each batch: the position moves by the samples of the step, and `loader.counts` (a
   `shard.StepCounts`, `None` for a full step) says what each part holds. `transfer` moves batches to the device.
5. `_complete` counts the epoch. A loader broken off stays the active one until another batch is given.

`position.Cursor` (`loader.cursor`) is the position for checkpoints; `skip` leaves first batches out.
`metrics.gather_for_metrics` reads `loader.counts` to return each sample once; `rows` knows the rows of any batch.
`workers` keeps worker processes alive when a rank is asked to end.
"""
