"""Custom ``autograd.Function``s: tried once whether their backward can be called in two parts, and then called so."""
