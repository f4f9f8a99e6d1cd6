"""The batched engine, an accelerator: one launch trains many clients, with the layers' weights stacked.

Only `local.engines` imports this package. Without it, clients are trained sequentially, with equal results up to
floating-point rounding.
"""
