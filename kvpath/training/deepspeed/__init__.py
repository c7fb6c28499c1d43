"""DeepSpeed's ZeRO: optimizer state, gradients and weights shared out over the ranks.

- `strategy`: the Trainer's strategy;
- `stepping`: one optimizer step through DeepSpeed's engine;
- `files`: how the engine writes and reads the files of a checkpoint, as plain values;
- `mistakes`: what is refused;
- `directory`: reads such a checkpoint, on any number of ranks, without DeepSpeed.
"""
