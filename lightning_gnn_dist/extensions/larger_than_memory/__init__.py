"""Rows that lie elsewhere than in RAM: in files, of which a cache holds some, and on the device; chunks held in turn.

    Loading(cache_bytes=1 << 30)     rows of files are read ahead, near ones at once; those needed soonest stay
    Loading(sample_on="auto")        what of a graph fits lies on the GPU: edges first, then rows that are read most
    Holding(Sweep(bytes=4 * 10**9))  a rank trains on some chunks of a graph, while it reads the next

files.py           rows of a graph's files, as a data module asks for them, read in few requests
ahead.py           the source of both this and shards: draws bulks ahead of their rows, which it brings together, and
                   keeps some
device_stream.py   brings batches to a device
placement.py       what of a graph lies on a device, by bytes and expected reads, and the source of its batches
rows_on_device.py  batches whose rows lie on a device where they are held there
device_sampler.py  draws batches on a device, hop by hop, in one graph of a bulk
chunks.py          which chunks are held, and when; where each begins in a saved graph, and what reads some
reorder.py         writes a graph chunk by chunk
memory.py          whether hosts have the memory of a fit, and the ways out where they have not

It needs ``asking``, by whose turns rows of several types are read together.
"""
