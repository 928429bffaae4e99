"""Expert stacks: the matrices of all experts of a layer, as one parameter of a model and as one dense matrix.

A model holds a stack as `[experts, out, in]`, or transposed as `[experts, in, out]`. A layer group holds it as one
matrix `[o, d]`, so that products, masks, checks and quantisation are those of a linear. Gate and up are joined along
the outputs: every row is multiplied by every expert. Down is joined along the inputs: its product is the sum over
experts, and a row has zeros where an expert does not take part.
"""

from torch import Tensor

from symbiosis_priv.checkpoints.layers import Joined


def join(stack: Tensor, *, joined: Joined, transposed: bool) -> Tensor:
    """The dense matrix `[o, d]` of a stack `[experts, out, in]` (`[experts, in, out]` if `transposed`). Shares the
    stack's memory where the layout allows it."""
    matrices = stack.transpose(1, 2) if transposed else stack
    return matrices.flatten(0, 1) if joined == "outputs" else matrices.transpose(0, 1).flatten(1)


def separate(matrix: Tensor, *, experts: int, joined: Joined, transposed: bool) -> Tensor:
    """The stack of a dense matrix `[o, d]`: the inverse of `join`."""
    matrices: Tensor
    if joined == "outputs":
        matrices = matrix.unflatten(0, (experts, -1))
    else:
        matrices = matrix.unflatten(1, (experts, -1)).transpose(0, 1)
    return matrices.transpose(1, 2) if transposed else matrices
