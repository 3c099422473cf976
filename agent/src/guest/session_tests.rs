//! A session on this machine, over a socket pair: the same code as in a guest.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use agent::Exec;

use super::*;

struct Host {
    stream: UnixStream,
    decoder: Decoder<FromGuest>,
}

impl Host {
    fn connect() -> Self {
        let (stream, guest) = UnixStream::pair().expect("a pair");
        thread::spawn(move || serve(guest));
        let mut host = Self { stream, decoder: Decoder::default() };
        assert!(matches!(host.hear(), Some(FromGuest::Hello(hello)) if hello.version == VERSION));
        host
    }

    fn run(argv: &[&str]) -> Self {
        let mut host = Self::connect();
        let argv = argv.iter().map(|&word| word.to_owned()).collect();
        host.say(&FromHost::Exec(Exec { argv, cwd: Some("/".into()), ..Exec::default() }));
        host
    }

    fn say(&mut self, message: &FromHost) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).expect("short");
        self.stream.write_all(&bytes).expect("the guest reads");
    }

    fn hear(&mut self) -> Option<FromGuest> {
        loop {
            if let Some(message) = self.decoder.message().expect("well formed") {
                return Some(message);
            }
            let mut portion = [0; 4096];
            match self.stream.read(&mut portion).expect("readable") {
                0 => return None,
                length => self.decoder.push(&portion[..length]),
            }
        }
    }

    /// Standard output, standard error and the end.
    fn outcome(mut self) -> (Vec<u8>, Vec<u8>, FromGuest) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        loop {
            match self.hear().expect("an end is announced") {
                FromGuest::Stdout(bytes) => out.extend(bytes),
                FromGuest::Stderr(bytes) => err.extend(bytes),
                end => {
                    assert_eq!(self.hear(), None, "nothing follows the end");
                    return (out, err, end);
                }
            }
        }
    }
}

#[test]
fn a_command_runs_and_its_streams_stay_apart() {
    let (out, err, end) = Host::run(&["sh", "-c", "echo out; echo err >&2; exit 7"]).outcome();
    assert_eq!((out.as_slice(), err.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(end, FromGuest::Exit(Status::Code(7)));
}

#[test]
fn input_that_a_command_did_not_read_costs_nothing_of_its_output() {
    let mut host = Host::run(&["sh", "-c", "sleep 0.3; head -c 100000 /dev/zero; exit 7"]);
    // More than the command's pipe and the agent hold.
    for _ in 0..10 {
        host.say(&FromHost::Stdin(vec![b'x'; 16_000]));
    }
    let (out, _, end) = host.outcome();
    assert_eq!((out.len(), end), (100_000, FromGuest::Exit(Status::Code(7))));
}

#[test]
fn a_signal_is_told_as_a_signal() {
    let (_, _, end) = Host::run(&["sh", "-c", "kill -9 $$"]).outcome();
    assert_eq!(end, FromGuest::Exit(Status::Signal(9)));
}

#[test]
fn words_are_not_interpreted_by_a_shell_and_the_environment_is_small() {
    let (out, _, _) = Host::run(&["printf", "%s", "$HOME; *"]).outcome();
    assert_eq!(out, b"$HOME; *");
    let (out, _, _) = Host::run(&["env"]).outcome();
    let mut names: Vec<_> = std::str::from_utf8(&out)
        .expect("text")
        .lines()
        .filter_map(|line| line.split('=').next())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["HOME", "LANG", "PATH", "TERM"]);
}

#[test]
fn a_program_that_is_not_there_fails_with_a_reason() {
    let (_, _, end) = Host::run(&["/no/such/program"]).outcome();
    assert!(matches!(end, FromGuest::Failed(why) if why.contains("No such file")));
    let (_, _, end) = Host::run(&[]).outcome();
    assert!(matches!(end, FromGuest::Failed(_)));
}

#[test]
fn input_arrives_whole_and_ends() {
    let host = Host::run(&["sha256sum"]);
    let stream = host.stream.try_clone().expect("a second handle");
    let speaking = thread::spawn(move || {
        let mut speaker = Host { stream, decoder: Decoder::default() };
        for _ in 0..160 {
            speaker.say(&FromHost::Stdin(vec![b'x'; agent::MAX_PAYLOAD]));
        }
        speaker.say(&FromHost::StdinEnd);
    });
    let (out, _, end) = host.outcome();
    speaking.join().expect("said");
    // sha256 of 10 MiB of 'x'.
    assert_eq!(&out[..16], b"462a12a876c0364e");
    assert_eq!(end, FromGuest::Exit(Status::Code(0)));
}

#[test]
fn ten_mebibytes_of_output_arrive_whole_at_a_slow_host() {
    let mut host = Host::run(&["head", "-c", "10485760", "/dev/zero"]);
    let mut total = 0;
    loop {
        match host.hear().expect("an end") {
            FromGuest::Stdout(bytes) => total += bytes.len(),
            end => break assert_eq!(end, FromGuest::Exit(Status::Code(0))),
        }
        if total % (1 << 20) < 4096 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(total, 10 << 20);
}

#[test]
fn a_command_that_ignores_its_input_dies_with_the_host() {
    let mut host = Host::run(&["sh", "-c", "echo $$; exec sleep 1000"]);
    let pid = match host.hear() {
        Some(FromGuest::Stdout(bytes)) => String::from_utf8(bytes).expect("text"),
        other => panic!("{other:?}"),
    };
    // More than a pipe holds, so that input is pending when we leave.
    for _ in 0..3 {
        host.say(&FromHost::Stdin(vec![0; agent::MAX_PAYLOAD]));
    }
    drop(host);
    let process = std::path::PathBuf::from(format!("/proc/{}", pid.trim()));
    let deadline = Instant::now() + Duration::from_secs(5);
    while process.exists() {
        assert!(Instant::now() < deadline, "still running");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_process_left_behind_does_not_delay_the_end() {
    let start = Instant::now();
    let (out, _, end) = Host::run(&["sh", "-c", "sleep 3 & echo done"]).outcome();
    assert_eq!((out.as_slice(), end), (&b"done\n"[..], FromGuest::Exit(Status::Code(0))));
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_second_exec_ends_the_connection_and_the_command() {
    let mut host = Host::run(&["sleep", "1000"]);
    host.say(&FromHost::Exec(Exec { argv: vec!["id".into()], ..Exec::default() }));
    assert_eq!(host.hear(), None);
}
