"""What is looked at before anything starts: settings, the folders of models, boxes, sizes; and which layout would do.

Nothing in it starts ranks or engines, and nothing in megarl but the entry points and the flow imports it.
"""
