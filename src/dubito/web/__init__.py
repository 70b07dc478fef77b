"""Pages that a person uses in a browser.

- `labelling`: `dubito label`, active learning with a person who answers

May import `report` and the rooms below it.
"""
