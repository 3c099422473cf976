//! Against a real server that speaks S3: pieces, ranges, lists and ends are what it makes of them.
//!
//! Needs `moto_server`, which `make setup-test` installs.
#![expect(clippy::expect_used, reason = "tests: what does not hold ends the test")]

use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vault::{Error, File, Location, Vault};

struct Server(Child, u16);

impl Server {
    fn start() -> Self {
        // Free again when this returns.
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let port = free().expect("a port").port();
        let mut server = Command::new("moto_server");
        let server = server.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        let child = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let server = Self(child.expect("moto_server: `make setup-test` installs it"), port);
        let began = Instant::now();
        let url = format!("http://127.0.0.1:{port}/bucket");
        let made = || {
            let mut curl = Command::new("curl");
            let curl = curl.args(["-sf", "-m", "5", "-o", "/dev/null", "-X", "PUT", &url]);
            curl.stderr(Stdio::null()).status().expect("curl").success()
        };
        while !made() {
            assert!(began.elapsed() < Duration::from_secs(60), "it does not answer");
            std::thread::sleep(Duration::from_millis(100));
        }
        server
    }

    fn vault(&self) -> Vault {
        let options = [
            ("AWS_ACCESS_KEY_ID", "somebody"),
            ("AWS_SECRET_ACCESS_KEY", "something"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT", &format!("http://127.0.0.1:{}", self.1)),
            ("AWS_ALLOW_HTTP", "true"),
            ("HOME", "/root"),
        ];
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let location =
            Location { url: "s3://bucket/some/prefix".to_owned(), options, ..Location::default() };
        Vault::open(&location, "node").expect("opened")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Promise 69.
#[tokio::test(flavor = "multi_thread")]
async fn files_go_to_s3_in_pieces_and_come_back_and_are_gone_when_forgotten() {
    let server = Server::start();
    let vault = server.vault();
    let dir = tempfile::tempdir().expect("a folder");
    let file = |folder: &str, name| {
        let folder = dir.path().join(folder);
        fs::create_dir_all(&folder).expect("a folder");
        File { name, path: folder.join(name) }
    };
    let given = [file("given", "memory"), file("given", "state"), file("given", "empty")];
    // Three pieces of noise, and a hole behind them.
    let mut seed = 1_u64;
    let noise: Vec<u8> = (0..20 << 20)
        .map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed.to_le_bytes()[3]
        })
        .collect();
    fs::write(&given[0].path, &noise).expect("written");
    fs::File::options()
        .write(true)
        .open(&given[0].path)
        .expect("there")
        .set_len(300 << 20)
        .expect("long");
    fs::write(&given[1].path, "the state").expect("written");
    fs::write(&given[2].path, "").expect("written");
    let stored = vault.put("1-demo", serde_json::Value::Null, &given).await.expect("kept");
    assert!((20 << 20..24 << 20).contains(&stored.bytes), "{stored:?}");
    let back = [file("back", "memory"), file("back", "state"), file("back", "empty")];
    server.vault().get(&stored, &back).await.expect("given back");
    for (was, is) in given.iter().zip(&back) {
        let same = Command::new("cmp").arg(&was.path).arg(&is.path).status();
        assert!(same.expect("cmp").success(), "{}", was.name);
    }
    vault.put("2-other", serde_json::Value::Null, &given[1..]).await.expect("kept");
    let keys = vault.keys().await.expect("listed");
    assert_eq!(keys.into_iter().collect::<Vec<_>>(), ["1-demo", "2-other"]);
    vault.forget("1-demo").await.expect("forgotten");
    vault.forget("1-demo").await.expect("twice is no error");
    assert_eq!(vault.keys().await.expect("listed").len(), 1);
    let gone = vault.get(&stored, &[file("third", "state")]).await.expect_err("it is gone");
    assert!(gone.is_missing(), "{gone}");
    // One that does not answer is not one that has it no more.
    drop(server);
    let error = vault.forget("2-other").await.expect_err("nobody answers");
    assert!(matches!(error, Error::Store { .. }), "{error}");
}
