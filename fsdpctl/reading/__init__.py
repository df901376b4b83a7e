"""How files of others are read: regular ones only, of bounded size and depth, of the right types.

Nothing of what they say is executed, resolved or followed out of their folder.
"""
