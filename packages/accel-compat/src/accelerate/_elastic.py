"""Words of torch's elastic launcher (`torch.distributed.run`)."""

ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"  # the first torch whose launcher takes a template

TORCH_LAUNCH_PARAMS = [
    "nnodes",  # who rendezvous, and where
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "standalone",
    "max_restarts",  # how processes are watched
    "monitor_interval",
    "start_method",
    "role",  # what is run
    "module",
    "m",
    "no_python",
    "run_path",
    "log_dir",  # where output goes; single letters are short flags
    "r",
    "redirects",
    "t",
    "tee",
    "node_rank",  # without a rendezvous
    "master_addr",
    "master_port",
]
