# Two commands do everything on a fresh Debian 12 machine, as root: `make demo` and `make test`.
# The other targets are their parts.

.PHONY: demo test build image setup-run setup-test lint deny test-unit test-world test-guest test-clients test-kernel \
  test-fuzz fuzz clean image-clients outside bench soak setup-bench build-bench
SHELL := /bin/bash
IMAGE ?= $(CURDIR)/target/image
OUTSIDE ?= $(CURDIR)/target/outside
FUZZ_SECONDS ?= 5
ROUNDS ?= 5

# A microVM behind Postern: what gets out, what does not, and why.
demo: setup-run image
	cargo build -p postern -p postern-tests --bins
	POSTERN_BIN=target/debug/postern target/debug/demo $(IMAGE)

test: setup-test
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory test-unit
	$(MAKE) --no-print-directory test-world
	$(MAKE) --no-print-directory test-guest
	$(MAKE) --no-print-directory test-clients
	$(MAKE) --no-print-directory test-kernel
	$(MAKE) --no-print-directory test-fuzz

setup-run:
	@deploy/setup.sh run
setup-test:
	@deploy/setup.sh test
setup-bench:
	@deploy/setup.sh bench

build:
	cargo build --workspace

# The guest: a Debian kernel, an initrd, a root file system. Rebuilt only when its inputs change.
image: setup-run
	deploy/image/build.sh $(IMAGE)

# The guest with the programs of test-clients, and the servers and clients outside of it.
image-clients:
	tests/clients/image.sh $(IMAGE)-clients
outside:
	tests/clients/outside.sh $(OUTSIDE)

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo deny --log-level error check licenses bans sources

# Pure cores, parsers, the API in process, the shape of the house. Needs root for the API's namespace.
test-unit:
	cargo test --workspace --lib --bins
	cargo test -p postern-tests --test house
	cargo test -p vault --test s3 --test hostile
	cargo test -p policy -p dns -p egress --test policy --test dns --test descriptors --test sniff --test tunnel --test tunnel_cost

# Needs root: real namespaces, taps, nftables, the real daemon; guests are namespaces behind taps.
test-world: build
	cargo test -p egress -p vmm --test fence_world --test router_world --test tap_world -- --test-threads=2
	cargo test -p egress --test origins_world
	cargo test -p postern-tests --test world -- --test-threads=2

# Needs root and QEMU: a real Debian guest.
test-guest: build image
	POSTERN_IMAGE=$(IMAGE) cargo test -p vmm --test qemu_guest -- --test-threads=1
	POSTERN_IMAGE=$(IMAGE) cargo test -p postern-tests --test guest -- --test-threads=1

# Needs root and QEMU: real programs in a Debian guest, and in namespaces, against real servers.
test-clients: build
	$(MAKE) --no-print-directory -j2 image-clients outside
	POSTERN_IMAGE_CLIENTS=$(IMAGE)-clients POSTERN_OUTSIDE=$(OUTSIDE) \
	  cargo test -p postern-tests --test clients -- --test-threads=2

# Needs root and QEMU: the fence and the router inside a guest, on the kernel of Debian 12.
test-kernel: build
	POSTERN_IMAGE_PACKAGES=nftables,netbase,kmod deploy/image/build.sh $(IMAGE)-kernel
	cargo test -p egress --test fence_world --test router_world --no-run
	POSTERN_IMAGE=$(IMAGE)-kernel cargo test -p postern-tests --test kernel -- --test-threads=1

# Every fuzz target for a few seconds: that it builds, runs and finds nothing at once.
test-fuzz:
	@cd fuzz && for target in $$(cargo fuzz list); do \
	  RUSTFLAGS= cargo fuzz run -s none $$target -- -max_total_time=$(FUZZ_SECONDS) -verbosity=0 || exit 1; \
	done

# The same for longer: make fuzz FUZZ_SECONDS=600
fuzz: setup-test test-fuzz

# What the way out costs, beside the programs that do a part of it; writes docs/benchmarks.md. Needs
# root. One alone: make bench-judge, -egress-splice, -egress-connect, -dns, -slots, -revoke, -writes,
# -density, -asleep, -standby, -resume.
bench: build-bench image
	POSTERN_BIN=target/release/postern POSTERN_IMAGE=$(IMAGE) target/release/bench all $(ROUNDS)
bench-%: build-bench image
	POSTERN_BIN=target/release/postern POSTERN_IMAGE=$(IMAGE) target/release/bench $* $(ROUNDS)

# Many guests misbehave for long. Shorter: make soak SOAK_SECONDS=60 SOAK_GUESTS=10
soak: build-bench image
	POSTERN_BIN=target/release/postern POSTERN_IMAGE=$(IMAGE) target/release/bench soak

build-bench: setup-bench
	cargo build --release -p postern -p postern-tests --bin postern --bin bench

clean:
	cargo clean
