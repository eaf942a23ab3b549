#!/bin/sh
# No scheduler: ssh reaches all hosts, which see the same files.
cat > hosts <<END
node0:2
node1:2
END
python -m chainer_fp8pipe launch -n 4 --hostfile hosts \
    --snapshots saved --every 5m --communicator fp8 train.py
