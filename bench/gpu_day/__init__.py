"""``python -m bench.gpu_day``: all that only a GPU can tell, by itself, in order of worth.

A GPU is at hand now and then, for half an hour, on a machine that has little more than this folder:

    export PYTHONPATH=src:.
    python -m bench.gpu_day --what-to-carry     what has to be there beside the tracked files
    python -m bench.gpu_day --minutes 9         the stages that fit into so many minutes
    python -m bench.gpu_day --only hits         one of them, also again; may be repeated
    python -m bench.gpu_day --runner 0          if V2 does not run
    python -m bench.gpu_day --smoke             all on a CPU, with fakes; figures mean nothing
    python -m bench.gpu_day --page A.json ...   a page of these days and cards, in Markdown

``--help`` has the table of the stages (``stages.py``); a call begins with its plan. One process
runs them, and engines live on from stage to stage. It is killed, and begun anew, when a stage takes
twice its time or fails. Stages that fit no more, or whose packages are missing, are skipped, and a
line says so. If vLLM's model runner V2 runs no engine, V1 runs all; if that runs none, what needs
one is skipped. With less memory or disk models are smaller (``sizes.py``).

Each figure is in ``--out`` as soon as it is there, also when the machine goes back in the middle. A
further call goes on with what that file lacks, in the same sizes if they still fit: bring it along.
If it is of another card or day, the figures go into one beside it. Calls on a machine that is kept
remove what killed ones left (``folder.py``). A page begins with what the figures decide, by rules
that were written before (``decisions.py``).

A figure that is ``false`` is a fault: the stage is ``wrong``, and so is the exit status. What the
names of figures mean stands at the top of each stage's file; times are medians over rounds.
"""
