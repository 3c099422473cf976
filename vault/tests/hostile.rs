//! A store that lies: it sends more than it says and more than it was asked for, lists without end, and is
//! not there for a moment.
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "tests: what does not hold ends the test"
)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use vault::{Error, File, Location, Stored, Vault};

/// What a client that reads on and on would take of one answer, and the most that one may that does not: what
/// the kernel holds on the way, and a piece of 8 MiB for each time that it asks again.
const ENDLESS: u64 = 1 << 30;
const BOUND: u64 = 128 << 20;

/// How one request is answered, by its first line: a head and a body, and whether that goes on for ever.
type Answers = dyn Fn(&str) -> (String, Vec<u8>, bool) + Send + Sync;

/// A server that answers so.
struct Store {
    port: u16,
    /// Bytes that somebody took.
    taken: Arc<AtomicU64>,
}

impl Store {
    fn that(answers: impl Fn(&str) -> (String, Vec<u8>, bool) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let (taken, answers): (Arc<AtomicU64>, Arc<Answers>) = (Arc::default(), Arc::new(answers));
        let store = Self { port, taken: taken.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (taken, answers) = (taken.clone(), answers.clone());
                std::thread::spawn(move || serve(stream, &*answers, &taken));
            }
        });
        store
    }

    fn vault(&self) -> Vault {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        let options = [
            ("AWS_ACCESS_KEY_ID", "somebody"),
            ("AWS_SECRET_ACCESS_KEY", "something"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT", &endpoint),
            ("AWS_ALLOW_HTTP", "true"),
        ];
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let url = "s3://bucket/prefix".to_owned();
        let location = Location { url, options, ..Location::default() };
        Vault::open(&location, "node").expect("opened")
    }
}

/// Answers one request after the other, until the other side ends.
fn serve(mut stream: TcpStream, answers: &Answers, taken: &AtomicU64) {
    let (mut asked, mut buffer) = (Vec::new(), [0; 8192]);
    loop {
        let Some(end) = asked.windows(4).position(|four| four == b"\r\n\r\n") else {
            match stream.read(&mut buffer) {
                Ok(0) | Err(_) => return,
                Ok(read) => asked.extend_from_slice(&buffer[..read]),
            }
            continue;
        };
        let head = String::from_utf8_lossy(&asked[..end]).into_owned();
        // A body is of no matter: what it has no head in is dropped with the connection.
        asked.drain(..end + 4);
        let (head, body, endless) = answers(head.lines().next().unwrap_or_default());
        let mut send = |bytes: &[u8]| {
            let sent = stream.write_all(bytes);
            taken.fetch_add(bytes.len() as u64, SeqCst);
            sent.is_ok()
        };
        if !send(head.as_bytes()) || !send(&body) {
            return;
        }
        let mut more = ENDLESS;
        while endless && more > 0 {
            let chunk = [&b"10000\r\n"[..], &[b' '; 0x10000], b"\r\n"].concat();
            if !send(&chunk) {
                return;
            }
            more -= 0x10000;
        }
        if endless {
            send(b"0\r\n\r\n");
        }
    }
}

/// An answer of this length, whole.
fn whole(status: &str, more: &str, body: &[u8]) -> (String, Vec<u8>, bool) {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: \"a\"\r\n\
         Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n{more}\r\n",
        body.len()
    );
    (head, body.to_vec(), false)
}

/// The same, of which the length is a lie.
fn endless(status: &str, more: &str) -> (String, Vec<u8>, bool) {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: 1000\r\nTransfer-Encoding: chunked\r\nETag: \"a\"\r\n\
         Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n{more}\r\n"
    );
    (head, Vec::new(), true)
}

fn refusal(code: &str) -> (String, Vec<u8>, bool) {
    let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
    whole("404 Not Found", "Content-Type: application/xml\r\n", body.as_bytes())
}

/// A list of one file, and how its owner would have noted it.
fn list() -> (Vec<u8>, Stored) {
    let list = br#"{"version":1,"of":null,"files":
        [{"name":"memory","length":65536,"bytes":1000,"sha256":"00"}]}"#;
    let sum = Sha256::digest(list).iter().map(|byte| format!("{byte:02x}")).collect();
    let url = "s3://bucket/prefix".to_owned();
    (list.to_vec(), Stored { key: "1-demo".to_owned(), url, bytes: 1000, list: sum })
}

async fn get(store: &Store) -> Error {
    let dir = tempfile::tempdir().expect("a folder");
    let file = File { name: "memory", path: dir.path().join("memory") };
    let got = store.vault().get(&list().1, &[file]).await;
    got.expect_err("nothing of it is what was kept")
}

/// Promise 69. Memory is the daemon's, and all sandboxes'.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_answers_without_end_is_read_no_further_than_it_was_asked() {
    let range = "Content-Range: bytes 0-999/1000\r\n";
    let objects = Store::that(move |line| match line {
        line if line.contains("manifest.json") => whole("200 OK", "", &list().0),
        _ => endless("206 Partial Content", range),
    });
    let error = get(&objects).await;
    assert!(
        matches!(&error, Error::Damaged { object, .. } if object.ends_with("memory")),
        "{error}"
    );
    let lists = Store::that(|_| endless("200 OK", ""));
    let error = get(&lists).await;
    assert!(matches!(&error, Error::Damaged { object, .. } if object.ends_with("json")), "{error}");
    let refuses = Store::that(|_| endless("403 Forbidden", ""));
    let error = get(&refuses).await;
    assert!(matches!(error, Error::Store { .. }), "{error}");
    let keys = Store::that(|_| endless("200 OK", ""));
    assert!(matches!(keys.vault().keys().await, Err(Error::Store { .. })));
    let forgets = Store::that(|_| endless("200 OK", ""));
    assert!(matches!(forgets.vault().forget("1-demo").await, Err(Error::Store { .. })));
    for (what, store) in [
        ("an object", objects),
        ("a list of files", lists),
        ("a refusal", refuses),
        ("keys", keys),
        ("what is to be forgotten", forgets),
    ] {
        let taken = store.taken.load(SeqCst);
        assert!(taken < BOUND, "{what}: {taken} bytes");
    }
}

/// Promise 69. The same with answers that end, one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_lists_more_and_more_is_asked_no_further_than_there_can_be_keys() {
    let pages = Arc::new(AtomicU64::new(0));
    let counted = pages.clone();
    let store = Store::that(move |_| {
        let page = counted.fetch_add(1, SeqCst);
        let object = |n| {
            format!(
                "<Contents><Key>prefix/node/{page}-{n}/memory</Key><Size>1</Size>\
                 <LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        };
        let objects: String = (0..1000).map(object).collect();
        let body = format!(
            "<?xml version=\"1.0\"?><ListBucketResult>{objects}<IsTruncated>true</IsTruncated>\
             <NextContinuationToken>{page}</NextContinuationToken></ListBucketResult>"
        );
        whole("200 OK", "Content-Type: application/xml\r\n", body.as_bytes())
    });
    let vault = store.vault();
    let keys = vault.keys();
    let began = Instant::now();
    tokio::select! {
        found = keys => {
            let error = found.expect_err("there is no end of it");
            assert!(matches!(&error, Error::Place { problem, .. } if problem.contains("65536")), "{error}");
        }
        () = async {
            while pages.load(SeqCst) < 100 {
                assert!(began.elapsed() < Duration::from_secs(300), "it stands still");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        } => panic!("a hundred thousand, and on and on"),
    }
}

/// Promise 69. Of those none is lost: it can be got back when the bucket is there again.
#[tokio::test(flavor = "multi_thread")]
async fn only_a_store_that_says_that_it_has_the_bucket_and_not_the_object_has_lost_it() {
    for (what, bucket, lost) in [
        ("control", Store::that(|_| refusal("NoSuchKey")), true),
        ("the bucket is not there", Store::that(|_| refusal("NoSuchBucket")), false),
        ("somebody else answers", Store::that(|_| whole("404 Not Found", "", b"")), false),
    ] {
        let error = get(&bucket).await;
        assert_eq!(error.is_missing(), lost, "{what}: {error}");
        let said = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(lost || said.contains("404"), "{what}: {said}");
    }
    let objects = Store::that(|line| match line {
        line if line.contains("manifest.json") => whole("200 OK", "", &list().0),
        _ => refusal("NoSuchBucket"),
    });
    let error = get(&objects).await;
    assert!(!error.is_missing(), "{error}");
}

/// Promise 69. So it is with a folder that is not mounted yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_is_not_there_has_lost_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    let location = Location { folder: path("store"), ..Location::default() };
    let vault = Vault::open(&location, "node").expect("opened");
    std::fs::write(path("memory"), "what it had").expect("written");
    let file = |name: &str| [File { name: "memory", path: path(name) }];
    let stored = vault.put("1-demo", serde_json::Value::Null, &file("memory")).await.expect("kept");
    std::fs::rename(path("store/node"), path("elsewhere")).expect("moved");
    let error = vault.get(&stored, &file("first")).await.expect_err("it is not mounted");
    assert!(!error.is_missing(), "{error}");
    std::fs::rename(path("elsewhere"), path("store/node")).expect("moved");
    vault.get(&stored, &file("second")).await.expect("it was there all the time");
    std::fs::remove_dir_all(path("store/node/1-demo")).expect("removed");
    let error = vault.get(&stored, &file("third")).await.expect_err("it is gone");
    assert!(error.is_missing(), "control: {error}");
}
