"""The HTML page of a run: from run folders to plain data, and from these to one offline page.

Reads what `megarl.observe` writes; `tools/view.py` and `tools/view_rollouts.py` use it. `static/` has the template,
style and scripts, and uPlot 1.6.32 (MIT, with its license). Nothing here writes to a run folder. What is broken in one
becomes a note on the page.
"""
