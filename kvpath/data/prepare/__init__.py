"""``kvpath prepare``: sources tokenised on all cores into shards.

run         what is missing, dealt to worker processes; the manifest
job         a share of the parts, and the locks that keep it to one process
worker      one part of a source, tokenised into whole shards
writer      the files of a shard while it is written
watch       progress, rate and time left
estimate    what it would give, by a sample
"""
