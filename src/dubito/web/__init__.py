"""Pages that a person uses in a browser.

- `labelling`: active learning with a person who answers, which `dubito label` runs

Its HTML, CSS and JavaScript are in folders called `assets`. May import `report` and the rooms below it.
"""
