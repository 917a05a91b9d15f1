"""The arithmetic of a request: what a model's cache, weights and steps come to on some device, and what they do here.

shape        what of a model counts: parameters, layers, heads (pure)
models       shapes of well-known models, and of any config.json
quantization the bits that a config.json says its weights are stored in (pure)
devices      GPUs with their published peaks (pure)
arithmetic   bytes and operations of prefill and decode, the roofline, what fits (pure)
allocators   the useful share of KV memory under contiguous and paged allocation (pure)
report       all of that for one model and one device, as plain data (pure)
measured     the same questions, asked of this machine's engine
plot         PNGs of both
"""
