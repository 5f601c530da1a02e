"""A deterministic simulator over the real state machines: one seed is one schedule of one small cluster.

After FoundationDB's simulation testing (https://apple.github.io/foundationdb/testing.html): the code of routers and
workers runs unmodified on an event loop with virtual time, over a network, a Redis and KV memory that fail.
"""
