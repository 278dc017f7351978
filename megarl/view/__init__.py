"""What a page about runs is made of: from run folders to plain data, and from these to one offline page.

Reads what `megarl.observe` writes and is imported by `tools/view.py` and `tools/view_rollouts.py` alone. `static/` has
the page's template, style and scripts, and uPlot 1.6.32 (MIT, its license beside it). Nothing here writes to a run
folder; what is broken in one becomes a sentence among the notes, and the rest is shown.
"""
