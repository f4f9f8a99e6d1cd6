"""The data sets that data_prep reads, one file each; `registry` names them."""
