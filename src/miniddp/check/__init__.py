"""Is my data parallel training right? A command that watches a script.

torchrun --nproc_per_node=2 -m miniddp.check train.py --its --options

`probes` note what each rank does, `exchange` carries the notes to one rank,
the modules in `kinds` read them, each for one kind of finding, and `report`
prints. To add a kind, copy one of these modules and name it in `kinds`.
"""
