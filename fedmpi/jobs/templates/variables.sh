# Environment:
#   FEDMPI_VENV         virtual environment to use (default: .venv in the submit directory, else the fedmpi of the PATH)
#   FEDMPI_ENVIRONMENT  file of lines to run first: module load ..., conda activate ...
#   FEDMPI_COMMAND      how a rank starts fedmpi, e.g. "apptainer exec fedmpi.sif fedmpi"
#   FEDMPI_LAUNCH       the launcher: srun (default), mpiexec, or more words, e.g. "mpiexec --bind-to none"
#   SLURM_MPI_TYPE      what srun speaks to the MPI: pmi2 (default; MPICH), pmix (Open MPI), cray_shasta (Cray)
