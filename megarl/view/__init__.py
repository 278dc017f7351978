"""The HTML viewer: read run folders into plain data and render them as one offline page.

Reads what `megarl.observe` writes; used by `megarl view` and `tools/view_rollouts.py`. `static/` has the template,
style and scripts, and uPlot 1.6.32 (MIT, with its license). Nothing here writes to a run folder. Damaged files become
notes on the page.
"""
