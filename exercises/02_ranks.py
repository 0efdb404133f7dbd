"""Exercise 2: add up in two levels.

Messages within a node are cheap, messages between nodes are not. So add
up on each node first. Then only one rank per node, its leader, talks to
the other nodes.

- Every rank has to call `new_group` for every group, members or not.
- The last node may have fewer ranks than the others.
- What does `new_group` return to a rank that is not a member?
"""

import torch.distributed as dist
from torch import Tensor


def make_groups(
    ranks_per_node: int,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the group of this rank's node, and that of all leaders.

    Node 0 has the ranks from 0 to `ranks_per_node - 1`, and so on. The
    first rank of a node is its leader. All other ranks get `None` in place
    of the second group.
    """
    raise NotImplementedError("exercise 2: one group per node, one of leaders")


def all_reduce(
    tensor: Tensor,
    node: dist.ProcessGroup,
    leaders: dist.ProcessGroup | None,
) -> None:
    """Replace `tensor` by the sum over all ranks of the job, in place.

    No collective has members on two nodes, except those of the leaders.
    """
    raise NotImplementedError("exercise 2: reduce on the node, add up, share")
