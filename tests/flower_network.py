"""A Flower federation on the loopback interface: a SuperLink and SuperNodes in processes of their own."""

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
ATTEMPTS = 4  # to start a process on ports that were free a moment before
PATIENCE = 600  # seconds until a command has ended or a process listens, on a busy machine


def free_ports(count):
    """Ports that nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.socket()) for _ in range(count)]
        for connection in connections:
            connection.bind(("127.0.0.1", 0))
        return [connection.getsockname()[1] for connection in connections]


def is_listening(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def make_certificates(folder):
    """A certificate authority and a certificate for 127.0.0.1; returns (authority, certificate, key)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def name(text):
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def builder(subject, key, is_authority):
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=is_authority,
            crl_sign=is_authority,
            encipher_only=False,
            decipher_only=False,
        )
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(identifier, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        )

    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = builder("authority", authority_key, True).sign(authority_key, hashes.SHA256())
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        builder("localhost", key, False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    contents = {
        "authority.pem": authority.public_bytes(pem),
        "certificate.pem": certificate.public_bytes(pem),
        "key.pem": key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }
    for file_name, content in contents.items():
        (folder / file_name).write_bytes(content)
    return tuple(folder / file_name for file_name in contents)


class Network:
    """A SuperLink, to which SuperNodes are added; the end of the `with` block ends all of them."""

    def __init__(self, folder, *, tls):
        self.folder = folder
        self.tls = tls
        self.processes = []
        self.home = folder / "flwr"
        self.home.mkdir(parents=True)
        self.environment = os.environ | {
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
        }
        self.help_text = self.call("flower-superlink", "--help").stdout
        self.one_port = "--port" in self.help_text

    def __enter__(self):
        try:
            self.start_superlink()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def start_superlink(self):
        """Starts a SuperLink, and tells `flwr` where it is."""
        options = ["--insecure"]
        security = "insecure = true"
        self.node_options = ["--insecure"]
        if self.tls:
            authority, certificate, key = make_certificates(self.folder)
            options = ["--ssl-ca-certfile", authority, "--ssl-certfile", certificate]
            options += ["--ssl-keyfile", key]
            security = f'root-certificates = "{authority}"'
            self.node_options = ["--root-certificates", authority]
        if "--disable-runtime-dependency-installation" in self.help_text:
            options.append("--disable-runtime-dependency-installation")

        def start():
            self.port, self.fleet_port, app_port = free_ports(3)
            ports = ["--port", self.port]
            if not self.one_port:
                ports = ["--control-api-address", f"127.0.0.1:{self.port}"]
                ports += ["--fleet-api-address", f"127.0.0.1:{self.fleet_port}"]
                ports += ["--serverappio-api-address", f"127.0.0.1:{app_port}"]
            process = self.start("superlink", "flower-superlink", *options, *ports)
            return process, self.port

        self.start_listening(start)
        settings = ["[superlink]", 'default = "test"', "[superlink.test]"]
        settings += [f'address = "127.0.0.1:{self.port}"', security]
        (self.home / "config.toml").write_text("\n".join(settings) + "\n")

    def call(self, *words, timeout=PATIENCE):
        """Runs a command to its end."""
        return subprocess.run(
            [str(word) for word in words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(self, name, *words):
        """Starts a process that writes to NAME.log."""
        with open(self.folder / f"{name}.log", "a") as log:
            process = subprocess.Popen(
                [str(word) for word in words],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_node(self, number, config):
        """Starts a SuperNode with a configuration, as on its command line."""
        superlink = self.port if self.one_port else self.fleet_port

        def start():
            (port,) = free_ports(1)
            address = ["--clientappio-api-address", f"127.0.0.1:{port}"]
            if self.one_port:
                address = ["--port", port]
            words = [*self.node_options, "--superlink", f"127.0.0.1:{superlink}", *address]
            words += ["--node-config", config]
            return self.start(f"node-{number}", "flower-supernode", *words), port

        return self.start_listening(start)

    def start_listening(self, start):
        """Starts a process that listens on a port; again, on another one, if it ends before it does."""
        for _ in range(ATTEMPTS):
            process, port = start()
            deadline = time.monotonic() + PATIENCE
            while process.poll() is None and time.monotonic() < deadline:
                if is_listening(port):
                    return process
                time.sleep(0.2)
            if process.poll() is None:
                break
        raise TimeoutError(self.logs())

    def kill(self, process):
        """Ends a process and all that it started, at once."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self):
        """Ends all processes of the network, also those in sessions of their own."""
        for process in self.processes:
            if process.poll() is None:
                self.kill(process)
        deadline = time.monotonic() + PATIENCE
        while (pids := self.remaining()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)

    def remaining(self):
        """The ids of processes that have this network's FLWR_HOME; [] where the system does not tell."""
        entry = f"FLWR_HOME={self.home}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if entry in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def logs(self):
        """The ends of all logs, for messages."""
        return "\n".join(f"{p.name}:\n{p.read_text()[-2500:]}" for p in self.folder.glob("*.log"))


def wait_until(is_done, seconds, describe):
    """Waits until something is true; fails with a description after some seconds."""
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.5)
