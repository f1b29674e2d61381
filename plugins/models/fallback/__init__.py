"""Runs the decoders of the transformers library on the engine's KV cache, batches, linear layers and ranks.

`library` finds an architecture and builds its modules without weights; `trace` runs their forward without numbers and
notes what attention computes; `build` puts the engine's layers in place of modules and has the loader fill the rest;
`locality` checks that nothing but attention mixes tokens.
"""
