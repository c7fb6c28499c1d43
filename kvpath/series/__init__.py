"""Studies of many runs: axes, seeds and stages from one file, run by any number of workers."""
