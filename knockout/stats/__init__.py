"""Statistics of paired 0/1 grades: pure functions on arrays, nothing of ours imported.

`paired` counts differences, `signflip` tests them, `interval` bounds their mean, `multiplicity`
corrects for many candidates, `sequential` settles candidates while data still arrive, and
`power` says what a design can see.
"""
