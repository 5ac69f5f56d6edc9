"""Attempts to get out of a sandbox: each prints ESCAPED if it succeeds, and does no harm then. `{name}` is filled in by
the test."""

from __future__ import annotations

SHELL = {
    # Files of the host.
    "read a file by its path": "cat {secret}",
    "read a sibling of the workspace": "cat ../outside/secret.txt; cat {workspace}/../outside/secret.txt",
    "list above the workspace": "ls .. ../.. | grep -qx outside && echo ESCAPED",
    "read through the root of a process": "cat /proc/*/root/{secret} /proc/{pid}/root/{secret}",
    "read through the directory of a process": "cat /proc/*/cwd/../outside/secret.txt /proc/{pid}/cwd/secret.txt",
    "read through a link made inside": "ln -s {secret} link; cat link",
    "read through a link to the root": "ln -s / root; cat root/{secret}; ln -s /proc/1/root r1; cat r1/{secret}",
    "link to a file of the host": "ln {secret} hard && cat hard",
    "mount over a directory": "mkdir m; mount --bind / m && cat m/{secret}",
    "a namespace of its own": "unshare -Urm sh -c 'mount -t tmpfs x /usr && echo ESCAPED'",
    "enter the namespaces of another process": "nsenter -t {pid} -m cat {secret}; nsenter -t 1 -a cat {secret}",
    "change the root": "chroot / id && echo ESCAPED",
    "a home directory": "cat ~root/.bashrc && echo ESCAPED; ls -A /home | grep . && echo ESCAPED",
    "what runs on the host": "ls /run /var/run /var/lib /var/log /srv /mnt /media /sys /boot | grep . && echo ESCAPED",
    "passwords": "cat /etc/shadow /etc/gshadow && echo ESCAPED; ls /etc/ssl/private && echo ESCAPED",
    "temporary files of the host": "ls -A /tmp | grep -vFx $(echo {workspace} | cut -d/ -f3) && echo ESCAPED",
    "shared memory as files": "ls -A /dev/shm | grep . && echo ESCAPED",
    "a disk": "ls /dev/sd* /dev/vd* /dev/nvme* /dev/mem /dev/kmem /dev/port | grep . && echo ESCAPED",
    "keep files among devices": "touch /dev/planted && echo ESCAPED",
    "make a device": "mknod disk b 254 0 && echo ESCAPED; mknod memory c 1 1 && echo ESCAPED",
    "memory of the kernel": "head -c1 /proc/kcore | grep . && echo ESCAPED",
    "messages of the kernel": "head -c1 /dev/kmsg | grep . && echo ESCAPED",
    # Writing where others read.
    "write to programs": "touch /usr/bin/planted && echo ESCAPED; touch /bin/planted && echo ESCAPED",
    "write to settings": "touch /etc/planted && echo ESCAPED; (: >>/etc/passwd) && echo ESCAPED",
    "write to the root": "touch /planted && echo ESCAPED; mkdir /planted /home/planted && echo ESCAPED",
    "write to the interpreter": "touch {prefix}/planted && echo ESCAPED; touch {prefix}/lib/planted && echo ESCAPED",
    "make it writable again": "mount -o remount,rw / && echo ESCAPED; mount -o remount,rw,bind /usr && echo ESCAPED",
    "unmount what covers": "umount /tmp && echo ESCAPED; umount -l /proc && echo ESCAPED; umount /usr && echo ESCAPED",
    "where dumps go": "(: >>/proc/sys/kernel/core_pattern) && echo ESCAPED",
    "keys of the kernel": "(: >>/proc/sysrq-trigger) && echo ESCAPED",
    "the name of the machine": "hostname planted && echo ESCAPED",
    "control groups": "ls /sys/fs/cgroup && echo ESCAPED; mkdir c; mount -t cgroup2 x c && echo ESCAPED",
    "settings of processes": "find /proc -maxdepth 1 -type f -writable | grep . && echo ESCAPED",
    "settings of the kernel": "find /proc/sys -type f -writable | grep . && echo ESCAPED",
    "a file system of its own": "mkdir p; mount -t proc x p && echo ESCAPED; mount -t sysfs x p && echo ESCAPED",
    # Processes.
    "the environment of others": "cat /proc/*/environ | tr '\\0' '\\n' | grep PLANTED_SECRET && echo ESCAPED",
    "own environment": "env | grep PLANTED_SECRET && echo ESCAPED; export -p | grep PLANTED && echo ESCAPED",
    "see processes of the host": "[ -d /proc/{pid} ] || [ $(ls -d /proc/[0-9]* | wc -l) -gt 12 ] && echo ESCAPED",
    "signal a process of the host": "kill -0 {pid} && echo ESCAPED",
    "inherited descriptors": "for f in $(ls /proc/$$/fd); do [ $f -gt 2 ] && [ $f -ne 255 ] && echo ESCAPED; done",
    "descriptors of the outer process": "readlink /proc/1/fd/* | grep -Ev 'pipe:|/dev/null|eventfd' && echo ESCAPED",
    "more rights by programs": "su -c id && echo ESCAPED; sudo -n id && echo ESCAPED; pkexec id && echo ESCAPED",
    "a program that sets the user": "cp /bin/bash b; chmod 6755 b; ./b -p -c 'touch /usr/planted' && echo ESCAPED",
    "capabilities": "grep ^Cap /proc/self/status | grep -v 0000000000000000 && echo ESCAPED",
    "own files to another user": "touch f; chown 12345 f && echo ESCAPED",
    "limits raised": "ulimit -f unlimited && echo ESCAPED; ulimit -v unlimited && echo ESCAPED",
    "killed last": "echo -1000 >/proc/self/oom_score_adj && echo ESCAPED",
}
"""By the shell and programs that any system has."""

PYTHON = {
    # Sockets.
    "the socket of the node": "connect(AF_UNIX, {socket!r})",
    "the socket of the node through a process": "connect(AF_UNIX, '/proc/self/root' + {socket!r})",
    "an abstract socket": "connect(AF_UNIX, '\\0' + {abstract!r})",
    "a service of the node": "connect(AF_INET, ('127.0.0.1', {port}))",
    "a service of the node over IPv6": "connect(AF_INET6, ('::1', {port}))",
    "the node by other addresses": "[connect(AF_INET, (one, {port})) for one in ('0.0.0.0', '127.0.0.2', {address!r})]",
    "the internet": "connect(AF_INET, ('192.0.2.1', 80))",
    "the metadata service": "connect(AF_INET, ('169.254.169.254', 80))",
    "a name": "socket.getaddrinfo('example.com', 80); escaped()",
    "a packet": "socket.socket(AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53)); escaped()",
    "a raw socket": "socket.socket(AF_INET, socket.SOCK_RAW, 1); escaped()",
    "packets of the network": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()",
    "an interface": "[escaped() for _, name in socket.if_nameindex() if name != 'lo']",
    # Calls of the kernel.
    "attach to a process of the host": "call(101, 0x4206, {pid}, 0, 0) == 0 and escaped()",  # which does not stop it
    "memory of a process of the host": "open('/proc/{pid}/mem', 'rb').read(1); escaped()",
    "a handle of a process": "os.pidfd_open({pid}); escaped()",
    "signal the outer process": "os.kill(1, 9); time.sleep(0.05); os.path.exists('/proc/1') or escaped()",
    "a file by its handle": "handle = ctypes.create_string_buffer(bytes([8, 0, 0, 0, 1, 0, 0, 0]) + bytes(8)); "
    "call(304, -100, handle, 0) >= 0 and escaped()",
    "a new mount": "call(165, b'x', b'/tmp', b'tmpfs', 0, 0) == 0 and escaped()",
    "a file system by descriptor": "call(430, b'tmpfs', 0) >= 0 and escaped()",
    "copy a mount": "call(428, -100, b'/usr', 1) >= 0 and escaped()",
    "a new root": "call(155, b'/', b'/tmp') == 0 and escaped()",
    "a namespace": "[call(272, flag) == 0 and escaped() for flag in (0x20000, 0x10000000, 0x40000000, 0x20000000)]",
    "a module of the kernel": "call(175, b'x', 1, b'') == 0 and escaped()",
    "a program in the kernel": "call(321, 5, ctypes.create_string_buffer(128), 128) >= 0 and escaped()",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped()",
    "the power of the machine": "call(169, 0xfee1dead, 672274793, 0x89abcdef, 0) == 0 and escaped()",
    "swap": "call(167, b'/tmp/x', 0) == 0 and escaped()",
    "another user": "os.setuid(0); escaped()",
    "another user, saved": "os.setresuid(0, 0, 0); escaped()",
    "another group": "os.setgroups([0]); escaped()",
    "capabilities back": "call(126, struct.pack('II', 0x20080522, 0), struct.pack('6I', *[0xffffffff] * 6)) == 0 and "
    "escaped()",
    "the input of a terminal": "fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x'); escaped()",
    "the input of a terminal by standard streams": "[fcntl.ioctl(one, 0x5412, b'x') or escaped() for one in (0, 1, 2)]",
    "the console": "fcntl.ioctl(os.open('/dev/console', os.O_RDWR), 0x5412, b'x'); escaped()",
    "shared memory of the host": "call(29, {key}, 0, 0) >= 0 and escaped()",
    "ports of the machine": "call(173, 0x80, 1, 1) == 0 and escaped()",
    "a very long path": "[(os.mkdir('d' * 200), os.chdir('d' * 200)) for _ in range(60)]; os.chdir('../' * 90); "
    "os.path.exists('outside') and escaped()",
    "a key for other commands": "call(248, b'user', b'planted', b'x', 1, -3) >= 0 and escaped()",
    "the keys of the session": "[call(250, 0, ring, 0) >= 0 and escaped() for ring in (-3, -4, -5)]",
    "keys by short pointers": "call(0x40000000 | 250, 0, -3, 0) >= 0 and escaped()",
    "what a virtual machine runs on": "socket.socket(socket.AF_VSOCK); escaped()",
    "a ring of calls": "call(425, 4, ctypes.create_string_buffer(120)) >= 0 and escaped()",
    "limits of others": "resource.prlimit({pid}, resource.RLIMIT_NOFILE); escaped()",
}
"""By Python, each in a process of its own; numbers are those of x86-64's calls."""

PROGRAM = """
import ctypes, fcntl, os, resource, socket, struct, sys, time
from socket import AF_INET, AF_INET6, AF_UNIX

libc = ctypes.CDLL(None, use_errno=True)

def escaped():
    os.write(1, b"ESCAPED ")

def call(*arguments):
    return libc.syscall(*arguments)

def connect(family, address):
    connection = socket.socket(family)
    connection.settimeout(1)
    try:
        connection.connect(address)
    except OSError:
        return
    escaped()

for name, text in ATTEMPTS.items():
    pid = os.fork()
    if not pid:
        os.write(1, b"\\n" + name.encode() + b": ")
        try:
            exec(text)
        except BaseException as error:
            os.write(1, type(error).__name__.encode())
        os._exit(0)
    os.waitpid(pid, 0)
os.write(1, b"\\nall tried\\n")
"""
