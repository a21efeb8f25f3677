for i in 1 2; do for d in /work/main /work/wt/lead; do echo "== $d"; PYTHONPATH=$d python /tmp/x/infer.py model0,lenet5 1,8 1,2; done; done
