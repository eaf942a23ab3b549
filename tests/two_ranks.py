"""mpiexec -n 2 python two_ranks.py: what is installed trains; where it is."""
import chainer_fp8pipe

import chainer
import chainermn
import numpy

comm = chainer_fp8pipe.create_communicator('fp8')
assert comm.size == 2
model = chainer.links.Linear(3, 2)
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), comm).setup(model)
for _ in range(3):
    model.cleargrads()
    y = model(numpy.full((4, 3), comm.rank + 1, 'f'))
    chainer.functions.sum(y * y).backward()
    optimizer.update()
weights = comm.gather_obj(model.W.array.tolist())
if comm.rank == 0:
    assert weights[0] == weights[1]
    print(chainer.__version__, chainer_fp8pipe.__file__)
