"""The CUDA codec: kernels that agree with docs/FORMAT.md byte for byte, and what launches them.

`encode`, `decode`, `decode_reduce` and `stats` are for whoever must not wait for the device (the collective layer);
`zipccl_core.encode` and `decode` are for everybody else. Importing this package compiles nothing and touches no device.

| module | launches | of |
|---|---|---|
| encode | encode_frames | words to frames, two kernels |
| decode | decode_frames | frames to words and verdicts, one kernel |
| decode_reduce | decode_reduce | frames and words of R ranks to their sum and verdicts, one kernel |
| stats | measure | words to histograms and codebooks, one kernel |
| jit | – | compiling, the cache, contexts, streams, job tables; the sole importer of PyCUDA |
"""
