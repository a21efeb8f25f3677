#!/bin/bash
# What the batch scripts need to know about your site; remove the # of the lines that apply. Read it
# before you submit, for the first part; every job reads it again:
#   source slurm/site.sh
#   sbatch slurm/node.sh --network cifar
# SITE=FILE, exported, names another file that the jobs read in place of this one.

# Options of sbatch. Those on its command line take precedence over these, and these over the
# #SBATCH lines of a script.
# export SBATCH_ACCOUNT=ACCOUNT
# export SBATCH_PARTITION=PARTITION
# export SBATCH_QOS=QOS
# export SBATCH_CONSTRAINT=FEATURE
# export SBATCH_RESERVATION=RESERVATION

# The modules and the environment with dptrain. Jobs inherit PATH from the shell that submits them,
# except at sites whose jobs start with an empty environment (--export=NONE).
# module load python openmpi
# source ~/dptrain/bin/activate

# The launcher. The default is for MPICH and MPIs derived from it. A variable LAUNCH of the shell
# that submits the job takes precedence. mpirun works with either MPI.
# LAUNCH=${LAUNCH:-srun --mpi=pmix}

# A command before dptrain, such as a container.
# container=(apptainer exec dptrain.sif)

# Network interfaces, if nodes have several.
# export NCCL_SOCKET_IFNAME=ib0 UCX_NET_DEVICES=mlx5_0:1 FI_TCP_IFACE=ib0
