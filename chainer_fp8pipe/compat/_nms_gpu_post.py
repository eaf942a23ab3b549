"""What ChainerCV has in C: the last step of non-maximum suppression on a GPU.

``install-chainer --with chainercv`` adds this file to its wheel.
"""
from typing import Any

import numpy


def _nms_gpu_post(mask: Any, n_bbox: int, threads_per_block: int,
                  col_blocks: int) -> tuple[Any, int]:
    """The boxes that no better one covers, and how many these are.

    Args:
        mask: Of each box ``col_blocks`` numbers, whose bits are the boxes
            that it covers.
        n_bbox: The number of boxes, the best first.
        threads_per_block: The bits used of a number.
        col_blocks: The numbers of a box.
    """
    covers = numpy.asarray(mask).reshape(-1, col_blocks)
    covered = numpy.zeros(col_blocks, covers.dtype)
    selection = numpy.zeros(n_bbox, numpy.int32)
    count = 0
    for box in range(n_bbox):
        block, bit = divmod(box, threads_per_block)
        if not int(covered[block]) >> bit & 1:
            selection[count] = box
            count += 1
            covered |= covers[box]
    return selection, count
