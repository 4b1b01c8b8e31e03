"""The processes of a run: each binds its resources and actions to a machine."""
