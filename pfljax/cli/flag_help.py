"""The help texts of the flags, written for the command line. Methods declare the texts of their own hyperparameters.

`help` adds the accepted values, the flags under which a flag applies, and the default, unless a text says "Default:".
"""

from __future__ import annotations

from collections.abc import Mapping

from pfljax.api import METRICS, models, tuning
from pfljax.data import sources

FILES = ", ".join(sources.FORMATS)

HELP: Mapping[str, str] = {
    # The method is registered by each command.
    # The network.
    "model": f"The clients' network: {', '.join(models.NAMES)}, or FILE.py:NAME for your own, a callable that takes "
    "num_classes. Several names with commas, a family of networks "
    f"({', '.join(models.FAMILIES)}) or FILE.py:NAME of a dict of networks give clients different networks. "
    "auto: linear for regression, lstm for the next characters of texts, encoder for labels of texts, otherwise "
    "mlp.",
    "hidden": "Widths of the mlp's hidden layers.",
    "channels": "Numbers of channels of the cnn's convolutions.",
    "patch": "Height and width of the vit's patches in pixels.",
    "width": "Width of the tokens of the vit, transformer or encoder.",
    "depth": "Number of blocks of the vit, transformer or encoder.",
    "heads": "Number of attention heads of the vit, transformer or encoder; a divisor of --width.",
    "style": "Family whose blocks the vit, transformer or encoder has. auto: vit for images, gpt2 for text.",
    # Frozen parameters and adapters.
    "frozen": "Safetensors file with the network's parameters, which then stay frozen. Default: all parameters are "
    "trained.",
    "frozen_layout": "Layout of that file: a published family's, or paths, the network's own.",
    "frozen_dtype": "Data type of the frozen parameters.",
    "adapter": "Adapter to train with the parameters of --trainable. prompt adds tokens to every block.",
    "adapter_rank": "Rank of lora, or length of prompt.",
    "adapter_where": "Regular expression that the paths of adapted parameters contain. Default: all paths that the "
    "adapter fits.",
    "trainable": "Regular expression; parameters whose paths contain it are trained. Empty: none.",
    # Local training.
    "rounds": "Number of communication rounds.",
    "learning_rate": "Learning rate of the clients.",
    "learning_rates": "Learning rates of single methods, as METHOD:RATE with commas. --learning_rate overrides them.",
    "batch_size": "Number of examples in a mini-batch; 0: all of a client's examples.",
    "epochs": "Number of passes over a client's data in a round.",
    "steps": "Number of steps in a round, instead of --epochs; 0: as --epochs says.",
    "keep_optimizer": "Keep the state of a client's optimizer from round to round. Otherwise moments start anew in "
    "every round, while counts of steps continue.",
    "common_init": "Start the clients' personal models from the same parameters. Default: true, but false for "
    "FedeRiCo and Local.",
    "loss": "Training and evaluation loss: auto, cross_entropy, mse, huber, bce, or FILE.py:NAME for your own, which "
    "takes (outputs, targets) and returns a loss per example. auto: cross_entropy for classes, mse for numbers, bce "
    "for several labels.",
    "label_smoothing": "Share of the target that is spread evenly over the classes in training. Losses by which "
    "methods weight models are smoothed too, except those of federico_friends.",
    "augment": "Augmentation of training images. crop_flip: random crops with a margin of 4 pixels, and mirroring.",
    "dtype": "Data type of the networks' computations, in evaluation too. With bfloat16, parameters, optimizers, sums "
    "and losses stay float32.",
    "matmul_precision": "Precision of float32 products, as in JAX. Default: JAX's setting, which is bfloat16 on TPUs.",
    "optimizer": "Optimizer of the clients, and of the model owners in FedeRiCo.",
    "momentum": "Momentum of sgd.",
    "weight_decay": "Weight decay: this times the parameters is added to the gradient.",
    "lr_schedule": "Schedule of the learning rate. multistep: divided by 10 after 1/2 and 3/4 of the rounds. "
    "exponential: multiplied by --lr_decay after every round.",
    "lr_decay": "Factor of the learning rate per round.",
    "class_weights": "Class weights in the training loss. inverse: inverse frequency, at most the weight of an "
    "average class.",
    # The run.
    "participation": "Fraction of the clients that take part in a round. With --client_privacy_noise_multiplier, "
    "the probability with which each client takes part.",
    "fine_tune_epochs": "Number of epochs that clients fine-tune for before they are evaluated.",
    "eval_clients": "Number of clients to evaluate, sampled uniformly; 0: all.",
    "tell_groups": "Give methods the true number of groups, unless you set it.",
    "planned_rounds": "Number of rounds that schedules are planned for. Default: --rounds.",
    "privacy_noise_multiplier": "Noise of differentially private training: standard deviation divided by the "
    "clipping norm. Needs pip install 'pfljax[privacy]'.",
    "privacy_clip_norm": "L2 norm to which the gradients of single examples are clipped; inf: no clipping, only "
    "without noise.",
    "privacy_delta": "Delta at which epsilon is reported.",
    "privacy_noise_seed": "Seed of the noise, for tests only: with it, anyone can subtract the noise. Default: a "
    "secret seed, which is never written.",
    "sampler": "Sampling of a round's clients. weighted: in proportion to their examples. power_of_choice: the "
    "largest losses among --server_candidates.",
    "server_candidates": "Number of candidates of power_of_choice; 0: twice the clients that take part.",
    "aggregator": "How the server combines the clients' updates.",
    "server_trim": "Share of attackers that robust aggregators assume. A trimmed mean drops this share of the values "
    "on each side.",
    "root_examples": "Number of examples that the server trains on to judge updates, drawn from all clients' "
    "training data.",
    "secure_aggregation": "Show the server only the sum of the clients' messages (Bonawitz et al., CCS 2017). "
    "Methods that need single messages are refused. Nothing is encrypted.",
    "attack_kind": "What attackers do. Attackers are not evaluated.",
    "attackers": "Share of the clients that attack.",
    "attack_strength": "Factor of the attack.",
    "attack_z": "Standard deviations between alie's updates and the honest mean; 0: the paper's formula.",
    "attack_target": "Class that the trigger of a backdoor stands for.",
    "attack_poisoned": "Share of an attacker's examples with the trigger.",
    "attack_trigger": "Value of the trigger's pixels or features, on the scale of the model's inputs.",
    "compression_upload": "Compression of the clients' updates: none, topk:SHARE, randomk:SHARE, quantize:BITS, sign "
    "or lowrank:RANK, such as topk:0.01.",
    "compression_download": "Compression of the models that clients receive: none or quantize:BITS, such as "
    "quantize:8.",
    "error_feedback": "Add to an update what compression left out of earlier ones.",
    "faults_dropout": "Share of a round's clients that fail before they train.",
    "faults_lost": "Share of a round's clients whose upload is lost.",
    "faults_broken": "Share of a round's clients whose upload is not finite.",
    "faults_on_divergence": "Handling of a loss that is not finite. drop: start over, and drop clients whose results "
    "are not finite from their rounds. stop: end the run with an error.",
    "client_privacy_noise_multiplier": "Noise of client-level differential privacy: standard deviation of the noise "
    "on the sum of updates, divided by the clipping norm.",
    "client_privacy_clip_norm": "L2 norm to which clients' updates are clipped, at first if it adapts; inf: no "
    "clipping, only without noise.",
    "client_privacy_mechanism": "gaussian: independent noise in every round, and clients take part at random. tree: "
    "the noise of a tree over rounds, for any cohorts.",
    "client_privacy_adaptive_quantile": "Share of the updates that the adaptive clipping norm leaves unclipped; 0: a "
    "fixed norm.",
    "client_privacy_clip_rate": "Learning rate of the adaptive clipping norm.",
    "client_privacy_count_noise": "Noise on the number of unclipped updates; 0: a twentieth of the expected clients.",
    "client_privacy_delta": "Delta at which the clients' epsilon is reported.",
    "client_privacy_noise_seed": "Seed of the noise and of the cohorts, for tests only. Default: a secret seed.",
    "patience": "Stop after this many rounds without a better validation score, or training loss without "
    "validation examples. Default: train all rounds.",
    "drift": "Changes of some clients' data, CHANGE@ROUND: after this round, their labels are permuted (labels), they "
    "take over each other's examples (exchange), or get new classes (classes); clients come (arrive) or leave for good "
    "(leave). Default: no change.",
    "drift_share": "Share of the clients that change, drawn for each change.",
    # The clock.
    "clock": "Simulate how long clients compute and send; see the flags --clock_*.",
    "clock_compute": "Seconds per mini-batch gradient: constant:VALUE, lognormal:MEDIAN:SIGMA, or "
    "two_class:VALUE:SHARE:FACTOR, in which this share of the clients is slower by the factor.",
    "clock_bandwidth": "Bandwidth in megabits per second, in the same forms as --clock_compute.",
    "clock_devices": "File of device capacities in FedScale's format, pickle or JSON; clients have its devices in "
    "turn. Default: drawn from --clock_compute and --clock_bandwidth.",
    "clock_availability": "Availability of the clients: always, daily:SHARE for this share of every day, or a file "
    "of times in FedScale's format.",
    "clock_deadline": "Seconds after which a round ends. Later updates are lost.",
    "clock_over_selection": "Share of additional clients in a round, which ends when the first clients are done.",
    "clock_turns": "Number of clients whose updates end a round, while the others continue. For methods without a "
    "server's model. 0: a round waits for all clients.",
    "clock_concurrency": "Number of clients that train at the same time with an asynchronous server (FedBuff, "
    "FedAsync); 0: twice as many as a round's updates, if there are so many.",
    "clock_seed": "Seed of the simulated devices, the same for all runs of a comparison.",
    # Data.
    "dataset": f"Data set: digits, sine, synthetic, hf:NAME, tfds:NAME, or the format of --data_file: {FILES}. "
    "file: the format that the path looks like.",
    "partition": "Division of the examples among clients. auto: natural if the data name clients, otherwise "
    "label_groups, or iid for regression.",
    "num_clients": "Number of clients; 0: all clients of a natural partition, otherwise 16.",
    "embedding": "Features that the latent partition clusters: pixels, classes, or those of a --model trained for "
    "it. auto: pixels of small images, otherwise classes if there are as many groups, otherwise vgg11.",
    "embedding_epochs": "Number of epochs that the embedding is trained for.",
    "test_fraction": "Share of a client's examples for testing. With --replacement, share of every pool that is set "
    "aside for testing.",
    "validation_fraction": "Share of a client's training examples for validation. Default: 0.2 if a method needs "
    "validation, 0.25 with --tune, otherwise 0.",
    "train_examples": "Maximum number of a client's training examples, with validation examples; 0: no maximum.",
    "test_examples": "Maximum number of a client's test examples; 0: no maximum, or 5,000 with synthetic.",
    "official_test": "Test clients on the data set's official test examples. Default: true for a --data_file with "
    "such examples, unless --test_fraction is given, otherwise false.",
    "replacement": "Let clients share examples: each draws --train_examples from its own label distribution.",
    "targets": "Validation and test examples of a client: its own, or another client's (shuffled).",
    "partition_groups": "Number of groups of clients with different data.",
    "partition_balanced": "Balance the numbers of clients per group. Otherwise groups are drawn at random.",
    "partition_alpha": "Dirichlet concentration; smaller values make clients more different.",
    "partition_classes": "Number of classes per client.",
    "partition_capped": "Give a client nothing of the remaining classes once it has its even share of all examples.",
    "partition_shards": "Number of shards per client.",
    "partition_growth": "Growth of the clients' numbers of examples with the client's number.",
    "partition_sizes": "Numbers of examples of the clients, up to a common factor. Default: as --partition_growth "
    "says.",
    "partition_strictness": "Weight of the target in the order of the examples; 0 makes clients alike, 1 gives them "
    "ranges of the target.",
    "partition_bins": "Number of bins of the target.",
    "partition_members": "Number of the data's clients in a client.",
    "by_time": "Split each client's examples by time: the latest are for testing, those before for validation. "
    "Without times, the order of the examples counts.",
    "data_time": "Column that says when each example was taken: numbers, dates, or texts such as 2024-05-31. "
    "Default: the order of the rows.",
    "data_fraction": "Fraction of the examples to use, sampled uniformly.",
    "synthetic_labels": "Labels of synthetic data. published: those of the paper's authors, of which a bug makes a "
    "quarter constant.",
    "data_file": "File or folder with your data, in the format of --dataset; see docs/howto/data.md.",
    "standardize": "Give inputs mean 0 and standard deviation 1, per channel of images and per feature otherwise, as "
    "measured on the training examples.",
    "task": "What is predicted. auto: numbers with a fraction are regression, columns of booleans multilabel, and "
    "everything else is classification.",
    "ignored_index": "Class of positions of sequences and images that do not count; negative classes never do. "
    "Default: only negative classes.",
    "data_stride": "Number of characters between the starts of consecutive windows of text.",
    "data_label": "Column with the labels: text or whole numbers for classes, other numbers for regression. Several "
    "columns with commas for several numbers or labels.",
    "data_client": "Column with the name of each example's client. Default: the data name no clients.",
    "data_features": "Columns of numbers to learn from. Default: all other columns.",
    "data_categorical": "Columns of categories to learn from, each of which becomes a column of 0 and 1. Default: "
    "no columns.",
    "data_text": "Column of text to learn from instead, by characters. Default: no column.",
    "data_test": "Column that marks the official test examples with True or test. Default: no column.",
    "fill": "Replacement for missing numbers. none: refuse them. mean: the mean of the training examples.",
    "separator": "Separator of a CSV file's columns, such as ; or tab. Default: a tab for .tsv files, otherwise a "
    "comma.",
    "encoding": "Encoding of a CSV file, such as latin-1.",
    "decimal": "Decimal point of a CSV file: a point or a comma. Default: a point.",
    "data_missing": "Texts that stand for missing values in a CSV file. Default: NA, NaN, null and others that pandas "
    "knows.",
    "data_image": "Feature with the images or arrays. Default: image, or else the first feature.",
    "data_size": "Height and width to which images are resized. Default: all images must have the same size.",
    "data_shape": "Shape of an example that the file stores as a list of numbers, such as 28,28,1. Default: the "
    "list's.",
    "data_dir": "Folder of the prepared TFDS data sets, or of the cache of Hugging Face's. Default: the library's own.",
    "data_config": "Configuration of a data set on the Hub, if it has several.",
    "data_test_split": "Split of a data set on the Hub with the official test examples.",
    "unseen": "Share of the clients to hold out of training; they adapt and are evaluated at the end.",
    # Execution.
    "plan": "How a device trains its clients: one by one (map), all at once (vmap), or --chunk at a time (chunk). "
    "auto: map on CPUs, the fastest estimate on TPUs and GPUs. python: plain loops without compilation, for "
    "debugging.",
    "chunk": "Number of clients at a time with --plan=chunk.",
    "devices": "Number of devices; 0: all, on a CPU one per core.",
    "model_devices": "Number of devices that share the model of one client; a divisor of the number of devices.",
    "exchange": "How models reach other devices: copied to all (gather), or passed around a ring (ring). auto: what "
    "fits in memory, and is faster on TPUs and GPUs.",
    "client_store": "Where clients' states and data are stored between rounds. host: in the host's memory. disk: in "
    "files, for states of clients that have taken part.",
    "cache_features": "Compute the outputs of frozen layers once per example if that is possible and saves time.",
    "profile": "Folder for a profiler trace of a few rounds; also prints a summary. Default: no trace.",
    "coordinator": "HOST:PORT of process 0, to connect several processes; auto: detect a TPU pod or SLURM. Default: "
    "a single process.",
    "num_processes": "Number of processes. Default: detected with --coordinator=auto.",
    "process_id": "Number of this process, from 0. Default: detected with --coordinator=auto.",
    "eval_every": "Number of rounds between evaluations. auto: 10, or more if evaluations would take more than a tenth "
    "of the time, as estimated from numbers of examples.",
    "checkpoint_every": "Rounds between checkpoints, or seconds, such as 60s. auto: a minute, or longer if "
    "saving would take more than a tenth of the time.",
    "score": "Score by which clients, rounds and methods are ordered and tuned: accuracy, loss, or a metric as in "
    "--metrics. Default: accuracy, or loss for regression.",
    "never_trained": "Model that serves clients that have never trained, for methods with a global model: global, or "
    "the client's initial one.",
    "metrics": f"Further metrics of each client's predictions: {', '.join(METRICS)}, or FILE.py:NAME for your "
    "own function. Default: no further metrics.",
    "tracker": "Tracker that logs every evaluation, to a folder of its name in the run's folder. Needs pip install "
    "'pfljax[NAME]'.",
    "verbose": "Print all lines of the plan.",
    # The run's folder, and pages.
    "seed": "Seed of the split, initial models, cohorts, mini-batches and sampling.",
    "split": "Seed of the split of the data. Default: --seed.",
    "resume": "Continue from the newest intact checkpoint in --out. from_scratch: start over in that folder.",
    "folder": "Folder of a run, or a folder that contains runs. The name of the flag can be omitted.",
    "paper": "Folder for figures of a comparison for a paper, as PDF and PNG. Default: no figures.",
    "paper_width": "Width of these figures in inches: 3.3 for a column, 6.8 for a page of two columns.",
    "port": "Port of the page; 0: a free port.",
    "refresh": "Seconds between two refreshes of the page.",
    # The processes of a table.
    "workers": "Number of processes that train the runs together.",
    "cells": "i/n: train every n-th run, from the i-th on. The last process to finish writes the table. Default: all "
    "runs.",
    "cluster": "Where --workers run. none: on this machine. slurm: as an array of SLURM jobs, which continue after "
    "interruptions. local: as jobs on this machine. Needs pip install 'pfljax[cluster]'.",
    "json": "Print the result as one JSON object on standard output, and everything else on standard error. With "
    "--json=FILE: write it to a file instead. Default: no JSON.",
    # Scaling.
    "cohort": "Numbers of clients per round; 0: all.",
    "shape": "Shape of an example.",
    "num_classes": "Number of classes.",
    "total_rounds": "Number of rounds to project the hours for; 0: no projection.",
    "preset": "Flags of a known workload. Default: none.",
    # The table.
    "methods": "Methods to compare, or all; FILE.py:NAME for your own.",
    "seeds": "Seeds of the runs; each determines the split, initial models, cohorts and mini-batches.",
    "splits": "Seeds of the data split; every seed is trained on every split. Default: the seeds determine the "
    "splits.",
    "replicate": "Train the trials of a method in one compiled program. auto: if their training data have the same "
    "shapes. vmap: also with padding. no: one after the other.",
    "rerun": "changed: train finished runs again if their settings, data, method or model have changed.",
    "out": "Folder of the table. Finished runs in it are not repeated.",
    "tune": "Learning rates from which each method's is chosen by the score on validation examples. Without a value: "
    "0.01,0.03,0.1,0.3,1,3. Default: no tuning.",
    "tune_hyperparameters": "Tune the hyperparameters that each method's paper tunes.",
    "tune_seeds": "Seeds of tuning, other than --seeds. Default: as many as --seeds, at most three, from "
    f"{tuning.SEEDS[0]}.",
    "tune_widen": "Largest number of further values to try if the best value is at the edge of those tried.",
    "keep_validation": "Train without the validation examples after tuning. Otherwise they are used for training, "
    "unless a method or --patience needs them.",
    "reference": "Method that the others are compared with, by paired differences, intervals and tests. Default: no "
    "comparison.",
    "target": "Score to reach, such as 0.9; with --clock, the table has the simulated seconds until then. Default: "
    "no target.",
    "seconds": "Time limit for compilation, in seconds. Further programs are not compiled.",
}
