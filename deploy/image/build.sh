#!/bin/bash
# Builds the guest image: vmlinuz, initrd.img, root.ext4. Usage: build.sh [directory, default target/image]
#
# Debian's cloud kernel and a Debian root from this machine's own apt sources, our agent as the first
# process. Installs nothing here; needs root, mmdebstrap, e2fsprogs, cpio and cargo. A step whose inputs
# did not change is skipped; delete the directory to build with today's Debian. POSTERN_IMAGE_PACKAGES adds
# packages (comma separated) to the root, and all modules of the kernel if kmod is one of them;
# POSTERN_IMAGE_TREE names a directory that is copied over it; POSTERN_IMAGE_SIZE is its size (1G).
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
source_dir=$(cd "$here/../.." && pwd)
out=$(mkdir -p "${1:-$source_dir/target/image}" && cd "${1:-$source_dir/target/image}" && pwd)
suite=bookworm
size=${POSTERN_IMAGE_SIZE:-1G}
tree=${POSTERN_IMAGE_TREE:-}
more=${POSTERN_IMAGE_PACKAGES:-}
case ,$more, in *,kmod,*) all_modules=yes ;; *) all_modules= ;; esac
packages=curl,ca-certificates,git,python3,openssl,iproute2,procps${more:+,$more}
# In the order the kernel needs them; a driver for either of QEMU's machines.
modules=(virtio_ring virtio virtio_mmio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci
    virtio_blk failover net_failover virtio_net virtio-rng button evdev)
export LC_ALL=C

say() { printf 'image: %s\n' "$*"; }
stop() { printf 'image: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || stop "needs root: mmdebstrap keeps the owners of files"
for program in mmdebstrap mke2fs cpio dpkg-deb apt-get cargo; do
    command -v "$program" >/dev/null || stop "needs $program"
done

# fresh STEP INPUTS FILE...: whether STEP was made from these INPUTS and its FILEs are there.
fresh() {
    local step=$1 inputs=$2 file
    shift 2
    for file; do [ -e "$out/$file" ] || return 1; done
    [ "$(cat "$out/.$step" 2>/dev/null)" = "$inputs" ] && say "$step: unchanged"
}
stamp() { printf '%s\n' "$2" >"$out/.$1"; }
digest() { sha256sum | cut -d' ' -f1; }

work=$(mktemp -d "$out/.work.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

# The agent: static, so that it runs in any root.
target=x86_64-unknown-linux-gnu
say "agent: building"
(cd "$source_dir" && RUSTFLAGS="-C target-feature=+crt-static -C strip=symbols" \
    cargo build --quiet --release --package agent --bin postern-guest --target "$target")
agent=${CARGO_TARGET_DIR:-$source_dir/target}/$target/release/postern-guest

# The kernel.
kernel=$(apt-cache depends --important linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p')
[ -n "$kernel" ] || stop "apt knows no linux-image-cloud-amd64: run apt-get update"
version=$(apt-cache show --no-all-versions "$kernel" | sed -n 's/^Version: //p')
inputs="$kernel $version ${modules[*]}"
unpack_kernel() {
    [ -e "$work/kernel" ] && return
    (cd "$work" && apt-get download -q "$kernel=$version" >/dev/null 2>"$work/log") || stop "$(cat "$work/log")"
    dpkg-deb -x "$work/$kernel"_*.deb "$work/kernel"
}
if ! fresh kernel "$inputs" vmlinuz modules; then
    say "kernel: $kernel $version"
    unpack_kernel
    rm -rf "$out/modules"
    mkdir "$out/modules"
    for module in "${modules[@]}"; do
        file=$(find "$work/kernel/lib/modules" -name "$module.ko" -print -quit)
        [ -n "$file" ] || stop "$kernel has no module $module"
        cp "$file" "$out/modules/"
    done
    printf '%s.ko\n' "${modules[@]}" >"$out/modules/order"
    install -m 644 "$work/kernel/boot/vmlinuz-${kernel#linux-image-}" "$out/vmlinuz"
    stamp kernel "$inputs"
fi

# The initial ram disk: the agent and the modules. Not compressed: 1 MiB is read faster than unpacked.
inputs=$(cat "$agent" "$out/.kernel" | digest)
if ! fresh initrd "$inputs" initrd.img; then
    say "initrd: packing"
    mkdir "$work/initrd"
    install -m 755 "$agent" "$work/initrd/init"
    cp -r "$out/modules" "$work/initrd/modules"
    (cd "$work/initrd" && find . -mindepth 1 | sort | cpio --quiet -o -H newc -R 0:0) >"$work/initrd.img"
    install -m 644 "$work/initrd.img" "$out/initrd.img"
    stamp initrd "$inputs"
fi

# The root: no manuals and translations, the licences stay. From the Debian sources this machine has.
sources=$(apt-get indextargets 'Created-By: Packages' 'Origin: Debian' 'Architecture: amd64' \
    --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' | grep -E " $suite(-updates|-security)? main$" | sort -u || true)
# A root that is not finished is thrown away: no need to wait for the disk after every file.
options=(--dpkgopt=force-unsafe-io
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright'
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*'
    # PostgreSQL and Java link their manuals there and fail without the folder.
    --essential-hook='mkdir -p "$1/usr/share/man/man1"')
[ -n "$sources" ] || stop "apt has no Debian $suite sources: run apt-get update"
files=${tree:+$(cd "$tree" && find . -printf '%P %m %s %T@\n' | sort)}
inputs=$(printf '%s\n' "$sources" "$suite $packages $size ${options[*]} ${all_modules:+$kernel $version}" "$files" | digest)
if ! fresh root "$inputs" root.ext4; then
    say "root: Debian $suite with $packages"
    printf '%s\n' "$sources" >"$work/sources.list"
    # A directory others may read, as the root of a file system is.
    mkdir -m 755 "$work/root"
    mmdebstrap --mode=root --variant=minbase --include="$packages" \
        "${options[@]}" "$suite" "$work/root" "$work/sources.list" </dev/null >"$work/log" 2>&1 ||
        stop "$(tail -n 30 "$work/log")"
    [ -z "$tree" ] || cp -a "$tree/." "$work/root/"
    if [ -n "$all_modules" ]; then
        unpack_kernel
        cp -a "$work/kernel/lib/modules" "$work/root/lib/"
        depmod -b "$work/root" "${kernel#linux-image-}"
    fi
    rm -f "$work/root/etc/resolv.conf" "$work/root/etc/hostname"
    for name in poweroff halt reboot shutdown; do
        ln -sf /run/postern/postern-guest "$work/root/usr/sbin/$name"
    done
    say "root: writing the file system"
    # Inode tables and journal are made whole now, or every guest would write them into its overlay.
    truncate -s "$size" "$work/root.ext4"
    mke2fs -q -F -t ext4 -L postern -m 0 -E lazy_itable_init=0,lazy_journal_init=0 \
        -d "$work/root" "$work/root.ext4"
    chmod 644 "$work/root.ext4"
    mv "$work/root.ext4" "$out/root.ext4"
    stamp root "$inputs"
fi

say "ready: $out"
(cd "$out" && du -h vmlinuz initrd.img root.ext4)
