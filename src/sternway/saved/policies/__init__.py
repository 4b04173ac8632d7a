"""What to do with the tensors that autograd saves: one policy a file.

_offload     move them to the host or to disk
_compress    encode them in fewer bytes (_codecs)
_mutable     copy them before they are written over
_recompute   compute them again in the backward, except some
_keep        leave some modules' tensors alone
_hooks       pass them through the user's own pair of hooks
_forbid      refuse policies and hooks in a block
"""
