"""Models and trainers of other people: `decorate` for models that nobody wants to edit.

`selection` says which modules of a model are its layers, `modules` puts the decorator on these instances and takes it
off again. Whatever needs a package that is not installed with ckptdeco is imported when it is used.
"""
